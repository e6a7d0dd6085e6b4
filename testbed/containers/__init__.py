"""containerd, CRI, Helm and node images, for tests and benchmarks."""
