"""What a start publishes behind itself: the image that it pulled, its trace, hot set and bundle."""
