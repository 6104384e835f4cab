"""The second driver of farfill's machines: a seeded world in virtual time, with faults, and checkers after every event.

Not a model of farfill: `RequestMachine`, `SenderMachine`, `ReceiverMachine`, `StoreMachine`, the path policy, plans,
manifests and sealing are the real ones. What is simulated is what stands around them: time, network, engines, clients.

    run          one seed, from scenario to report: `simulate(seed)`
    scenario     what a seed draws: cluster, requests, faults
    world        virtual time, seeded dice, the trace and its digest
    network      connections as TCP has them, cut and stalled
    engine       bytes that depend on the prompt, tokens that depend on every byte
    actors/      thin drivers: gateway, prefill, decode, store
    faults       carrying the scenario's faults out
    checkers     what must hold
"""
