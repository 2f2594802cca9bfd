"""Producers: who makes samples and episodes (sampler, rollout, demonstrations)."""
