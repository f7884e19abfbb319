"""What no committed result has shown to pay, off unless its own setting is on (CONTRIBUTING.md,
"Proof of value"). The rest of ds_usp imports it where that setting is read, and nowhere else."""
