/** What the key may know about itself: its scopes, limits and prices. Empty on a server without a database. */

import { signal } from "@preact/signals";

import { getJson } from "./api";
import type { AccountInfo, PriceNow } from "./api_types";

export const account = signal<AccountInfo | null>(null);

export async function loadAccount(): Promise<void> {
  try {
    account.value = await getJson<AccountInfo>("api/2.0/account");
  } catch {
    account.value = null; // no database, or no key yet: the views that need it say so
  }
}

/** Return the price of an endpoint's served model; without the latter, if all its models cost the same. */
export function priceOf(endpoint: string, servedModel: string): PriceNow | null {
  const prices = account.value?.prices.filter((one) => one.endpoint === endpoint) ?? [];
  const named = prices.find((one) => one.served_model === servedModel);
  if (named !== undefined) return named;
  const [first] = prices;
  const alike = (one: PriceNow) => one.input === first?.input && one.cached === first.cached && one.output === first.output;
  return first !== undefined && prices.every(alike) ? first : null;
}

/** Return the cost of a request in the currency; prices are for a million tokens. */
export function costOf(price: PriceNow, prompt: number, cached: number, completion: number): number {
  const input = (prompt - cached) * Number(price.input) + cached * Number(price.cached);
  return Math.round(input + completion * Number(price.output)) / 1e6; // micro-units, rounded as the ledger does
}

export function isFree(price: PriceNow): boolean {
  return [price.input, price.cached, price.output].every((one) => Number(one) === 0);
}

export function money(amount: number, currency: string): string {
  return `${amount.toFixed(6).replace(/(\.\d\d\d*?)0+$/, "$1")} ${currency}`.trim();
}
