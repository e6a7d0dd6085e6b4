"""What a set-up is: its command, where it runs, what it reads and writes; and so its key."""
