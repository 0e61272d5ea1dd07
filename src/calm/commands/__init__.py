"""What the command line does and shows, a file for each command that is more than a call."""
