/** Copies of requests (shadow traffic): how rows of the ledger are recognised, and what they are called. */

/** The tenant and the key of copies in the ledger. No other tenant or key can have this name. */
export const SHADOW = "shadow";

/** Return the name of a tenant or key, with what it means if it is that of copies. */
export function payer(name: string): string {
  return name === SHADOW ? "shadow (copies of requests)" : name;
}
