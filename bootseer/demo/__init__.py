"""`bootseer demo`: one job launched twice on one machine, with real parts and a slow network."""
