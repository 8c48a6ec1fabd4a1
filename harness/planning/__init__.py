"""From a configuration to a plan with its prediction: profile, plan, simulate; the search of mode=tune."""
