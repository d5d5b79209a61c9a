"""Speed and memory, measured on request; see README.md here."""
