"""Layer 0, integers only, no torch: token layouts, masks, tiles, ring schedules, degrees."""
