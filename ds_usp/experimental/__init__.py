"""What no committed result has shown to pay, off unless its own setting is on (CONTRIBUTING.md,
"Proof of value"). Nothing else of ds_usp imports it."""
