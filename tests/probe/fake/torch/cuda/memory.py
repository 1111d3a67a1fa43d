def get_per_process_memory_fraction(device):
    return 1.0
