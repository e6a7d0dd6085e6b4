"""What the case `compile` starts: one program, whose first step waits for a compiler."""
