/** The facts about a limit beside its value: whether it refuses, and at which shares of it webhooks are told. */

/** Return what happens to a request beyond a limit. */
export function beyond(soft: boolean): string {
  return soft ? "only counted (soft)" : "refused";
}

/** Return shares of a limit as percentages; without any, that nobody is told. */
export function percentages(shares: number[]): string {
  return shares.length ? `${shares.map((one) => `${Math.round(one * 1000) / 10} %`).join(", ")} of it` : "none";
}
