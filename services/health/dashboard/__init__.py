"""The dashboard: what the cluster does now, as pages that a browser keeps up to date.

In: the master's picture (`ClusterView`), asked once a second for all viewers of a tenant together. Out: HTML, rendered
here, and changed parts of it as server-sent events. Never: a decision about who may see what (the master decides by the
session that is handed on), state that must survive, or anything that changes the cluster.
"""
