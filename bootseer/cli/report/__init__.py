"""`bootseer report`: starts explained and compared."""
