"""Cases: a module declares one as CASE, or several as CASES."""
