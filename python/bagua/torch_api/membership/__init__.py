"""Finding and losing ranks: stores by which they meet, torch.distributed beside the group, `rebuild`, elastic jobs."""
