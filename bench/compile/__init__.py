"""Program of the case `compile`, whose first step waits for a compiler."""
