"""Frozen backbones; `load_backbone` is the way in."""

from joynexus.vla.backbones.base import Backbone
from joynexus.vla.backbones.load import load_backbone

__all__ = ["Backbone", "load_backbone"]
