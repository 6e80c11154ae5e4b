"""What is measured, how, and against whom: see README.md."""
