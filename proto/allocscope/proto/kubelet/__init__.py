"""What is asked of a node's kubelet; only the daemon does."""
