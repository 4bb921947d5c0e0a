"""The verifier: owns requests, schedule, block tables, acceptance, the commit path, the loop."""
