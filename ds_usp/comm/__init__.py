"""Floor 1: process groups and what travels between ranks. Knows no attention."""
