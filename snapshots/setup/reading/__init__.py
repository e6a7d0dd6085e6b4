"""What the words of a set-up command tell: the files it reads, the directories it writes. Pure."""
