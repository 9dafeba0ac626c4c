"""What a script does on a pretended device, as a rank program."""
