"""What a start's timelines say: where the time went, and which node held the others."""
