"""Membership: joining a job through stores, torch.distributed next to the group, ``rebuild``, and elastic jobs."""
