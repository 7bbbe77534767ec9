"""Rollout: tensor-parallel inference copies beside a live trainer, brought up to date in place by relayouts."""
