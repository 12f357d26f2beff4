"""How wisp, the embedded model, and its drafts are trained. Needs torch; never imported by the package."""
