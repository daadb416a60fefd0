/** The models that the key may use: endpoints, their served models where there are several, and their adapters. */

import { signal } from "@preact/signals";

import { getJson, messageOf } from "./api";

export type Task = "chat" | "completions" | "embeddings";

export interface ModelGroup {
  endpoint: string;
  type: string; // such as llm/v1/chat
  names: string[]; // the endpoint first, then its served models if it has several, then endpoint:adapter
}

export const modelGroups = signal<ModelGroup[]>([]);
export const modelsError = signal("");
export const modelsLoaded = signal(false);

interface Card {
  id: string;
  parent?: string;
  served_models?: { name: string }[];
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
    const types = new Map(entries.endpoints.map((one) => [one.name, one.endpoint_type]));
    const groups = new Map<string, ModelGroup>();
    for (const card of cards.data) {
      const endpoint = card.parent ?? card.id;
      const type = types.get(endpoint);
      if (type === undefined) continue;
      const group = groups.get(endpoint) ?? { endpoint, type, names: [] };
      group.names.push(card.id);
      const served = (card.served_models ?? []).map((one) => one.name).filter((name) => name !== endpoint);
      if (card.parent === undefined && served.length > 1) group.names.push(...served);
      groups.set(endpoint, group);
    }
    modelGroups.value = [...groups.values()];
    modelsError.value = groups.size ? "" : "This server has no model that the key may use.";
  } catch (error) {
    modelGroups.value = [];
    modelsError.value = messageOf(error);
  }
  modelsLoaded.value = true;
}

// a chat model also completes texts and gives embeddings; the server says so where one cannot
const SERVES: Record<Task, string[]> = {
  chat: ["llm/v1/chat"],
  completions: ["llm/v1/chat", "llm/v1/completions"],
  embeddings: ["llm/v1/embeddings", "llm/v1/chat", "llm/v1/completions"],
};

/** Return the groups whose models may serve `task`; those made for it come first. */
export function groupsOf(task: Task): ModelGroup[] {
  const types = SERVES[task];
  return modelGroups.value
    .filter((group) => types.includes(group.type))
    .toSorted((one, other) => types.indexOf(one.type) - types.indexOf(other.type));
}

export function namesOf(task: Task): string[] {
  return groupsOf(task).flatMap((group) => group.names);
}

/** Return the endpoint that a name of a model belongs to. */
export function endpointOf(model: string): string {
  return modelGroups.value.find((group) => group.names.includes(model))?.endpoint ?? model;
}

/** Return whether an endpoint has this served model beside others, so that its name says which one answered. */
export function isOneOfSeveral(servedModel: string): boolean {
  // an endpoint's own name is among its names too, and the only served model is often called the same
  return modelGroups.value.some((group) => group.endpoint !== servedModel && group.names.includes(servedModel));
}
