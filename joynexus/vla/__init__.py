"""The part of JoyNexus with torch: backbones, features, action modules, policies, versions, exported policies.

Importing this package loads no torch, so that `numerics.configure` can still choose how torch computes.
"""
