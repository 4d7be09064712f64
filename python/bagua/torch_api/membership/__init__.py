"""Membership: stores, torch.distributed beside the group, `rebuild`, elastic jobs."""
