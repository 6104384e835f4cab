"""vLLM as an engine of farfill: a KV connector that vLLM itself loads. Not an engine of our own, nor a fork of vLLM.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "FarfillConnector",
    "kv_connector_module_path": "farfill.engines.vllm.connector", "kv_role": "kv_producer", ...}'

connector.py       what vLLM calls; delegates every hook to one of the two sides
scheduler_side.py  in vLLM's scheduler: which request sends or loads what, into which blocks
worker_side.py     in vLLM's worker: the transfers, and the bytes in and out of the paged cache
step.py            what the first tells the second, each engine step
kv_views.py        vLLM's paged tensors as rows and states in wire order
identity.py        layout and fingerprint from vLLM's own configuration
control.py         HTTP beside vLLM's own: worker info, store control, results of transfers
"""
