/** The models that the key may use: endpoints, their served models where there are several, and their adapters. */

import { signal } from "@preact/signals";

import { getJson, messageOf } from "./api";
import type { DeploymentEndpoints, ModelList } from "./api_types";

export type Task = "chat" | "completions" | "embeddings";

type Sampling = Record<string, unknown>;

export interface ModelGroup {
  endpoint: string;
  type: string; // such as llm/v1/chat
  names: string[]; // the endpoint first, then its served models if it has several, then endpoint:adapter
}

export const modelGroups = signal<ModelGroup[]>([]);
const samplings = signal<Record<string, Sampling>>({});
export const modelsError = signal("");
export const modelsLoaded = signal(false);

export async function loadModels(): Promise<void> {
  try {
    const [cards, entries] = await Promise.all([
      getJson<ModelList>("v1/models"),
      getJson<DeploymentEndpoints>("api/2.0/endpoints/"),
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
    samplings.value = Object.fromEntries(cards.data.map((one) => [one.id, one.sampling_defaults ?? {}]));
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

// a model with one of these has been tuned to it
const TRUNCATING = ["temperature", "top_p", "top_k", "min_p", "typical_p"];
const TEMPERATURE = 0.7; // as mlflow-llm chat has it

/** Return the sampling values that a model has of its own. */
export function ownSampling(model: string): Sampling {
  return samplings.value[model] ?? samplings.value[endpointOf(model)] ?? {};
}

/** Return the temperature of requests that name none; null if the model has sampling values of its own. */
export function fittingTemperature(model: string): number | null {
  const own = ownSampling(model);
  return TRUNCATING.some((name) => name in own) ? null : TEMPERATURE;
}

/** Return whether an endpoint has this served model beside others, so that its name says which one answered. */
export function isOneOfSeveral(servedModel: string): boolean {
  // an endpoint's own name is among its names too, and the only served model is often called the same
  return modelGroups.value.some((group) => group.endpoint !== servedModel && group.names.includes(servedModel));
}
