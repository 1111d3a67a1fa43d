"""Version 1 of the kubelet's PodResources API, as much of it as we read."""
