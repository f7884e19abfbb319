"""Import layer 1: process groups and exchanges between ranks. Knows no attention."""
