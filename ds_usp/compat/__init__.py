"""Names and functions of other packages, served by ds_usp: nothing in their callers changes."""
