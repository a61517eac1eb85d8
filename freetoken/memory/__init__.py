"""Host memory: how much may be allocated (`budget`), and where pages lie."""
