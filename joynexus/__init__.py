"""JoyNexus: multi-tenant post-training of vision-language-action policies; this package is the tenant's side."""
