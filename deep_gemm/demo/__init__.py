"""A small Qwen3-style mixture-of-experts language model, trained on the sources of the Python standard library: `python -m deep_gemm.demo`.

model.py      the model; its experts are `deep_gemm.nn.MegaMoE`        data.py      text, split, batches
training.py   gradients across ranks, AdamW, the loop, held-out loss   check.py     MoE gradients against autograd of the plain formula
report.py     loss curve as JSON and PNG                               __main__.py  flags, processes
"""
