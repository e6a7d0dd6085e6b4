"""What runs on the nodes of a Kubernetes cluster: the process under which the servers of mounts
live, and the CSI driver."""
