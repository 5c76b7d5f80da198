from amanda._api import *
