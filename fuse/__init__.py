"""File systems: the kernel protocol (`kernel`) and the checkpoint path (`striped`)."""
