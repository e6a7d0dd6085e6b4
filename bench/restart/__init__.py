"""What the case `restart` starts: a job of four workers under torchrun, and how it is watched."""
