"""The parts of a file that is being written: open, written, watched, given up."""
