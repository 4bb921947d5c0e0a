"""The walk from settings to a plan: method, draft, rules over several fields, budgets."""
