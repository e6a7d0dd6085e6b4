"""Job of the case `restart`: four workers under torchrun, and the events they note."""
