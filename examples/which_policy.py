"""Which of three policies for these conversations on one L20? Prints a table, and what differs in words.

python examples/which_policy.py [REQUESTS_PER_SECOND]
"""

import sys

import kvtwin

scenario = kvtwin.Scenario(
    workload="sharegpt",
    num_prompts=300,
    request_rate=float(sys.argv[1]) if len(sys.argv) > 1 else 6.0,
    model="llama-2-7b",
    gpu="l20",
    goodput=("ttft:3000", "tpot:200"),
)
compared = kvtwin.compare(scenario, ["vllm-v1", "vllm-recompute", "layerkv"])
print(compared.table.round(1).to_string())
print(*compared.sentences, sep="\n\n")
