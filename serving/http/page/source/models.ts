/** The chat models that the key may use: endpoints, and each of their adapters. */

import { signal } from "@preact/signals";

import { getJson, messageOf } from "./api";

export interface ModelGroup {
  endpoint: string;
  names: string[]; // the endpoint itself first, then endpoint:adapter
}

export const modelGroups = signal<ModelGroup[]>([]);
export const modelsError = signal("");
export const modelsLoaded = signal(false);

interface Card {
  id: string;
  parent?: string;
}

interface EndpointEntry {
  name: string;
  endpoint_type: string;
}

export async function loadModels(): Promise<void> {
  try {
    const [cards, entries] = await Promise.all([
      getJson<{ data: Card[] }>("v1/models"),
      getJson<{ endpoints: EndpointEntry[] }>("api/2.0/endpoints/"),
    ]);
    const chats = new Set(entries.endpoints.filter((one) => one.endpoint_type === "llm/v1/chat").map((one) => one.name));
    const groups = new Map<string, ModelGroup>();
    for (const card of cards.data) {
      const endpoint = card.parent ?? card.id;
      if (!chats.has(endpoint)) continue;
      const group = groups.get(endpoint) ?? { endpoint, names: [] };
      group.names.push(card.id);
      groups.set(endpoint, group);
    }
    modelGroups.value = [...groups.values()];
    modelsError.value = groups.size ? "" : "This server has no chat model that the key may use.";
  } catch (error) {
    modelGroups.value = [];
    modelsError.value = messageOf(error);
  }
  modelsLoaded.value = true;
}

export function modelNames(): string[] {
  return modelGroups.value.flatMap((group) => group.names);
}
