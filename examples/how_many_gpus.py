"""How many L20s do these conversations need under SLOs, and what would carry more? A search; its runs are kept in DIR.

python examples/how_many_gpus.py [DIR]
"""

import sys
import tempfile

import kvtwin

study = {
    "workload": "azure-conv-2023",
    "num-prompts": 200,
    "clip": 4096,
    "model": "llama-2-7b",
    "gpu": "l20",
    "policy": ["vllm-v1", "layerkv"],
    "tune": {"goal": "gpus", "slo": ["p99_ttft_ms:3000", "p99_tpot_ms:200"]},
}
folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
print(kvtwin.tune(study, folder, jobs=1).text)
