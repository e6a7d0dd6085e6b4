"""containerd, CRI, Helm and the image of Bootseer's own pods, for tests and benchmarks."""
