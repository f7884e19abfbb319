"""Layer 1: attention of one query shard with one key/value block on one device."""
