"""The parts of a file that is being written: placed, open, written, watched, given up."""
